"""KV caches: what one would need (`memory`, `models`), before anything is allocated."""
