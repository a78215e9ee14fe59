"""vLLM: keep the KV of prompts across requests, engines and machines."""
