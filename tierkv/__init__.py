"""tierkv keeps the KV cache of LLM engines in tiers below the GPU."""

__version__ = "0.1.0"
