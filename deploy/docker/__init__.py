"""Dockerfiles for CPU and CUDA machines, and what checks them."""
