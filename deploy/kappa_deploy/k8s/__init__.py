"""Manifests for Kubernetes with KubeRay, and what renders and checks them."""
