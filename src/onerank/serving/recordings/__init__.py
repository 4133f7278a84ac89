"""Recordings of vLLM and SGLang: tables of their steps, and the bundle from them."""
