"""Decides which worker serves a request; pure decision files beside thin Ray and HTTP adapters."""
