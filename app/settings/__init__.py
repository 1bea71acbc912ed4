"""Settings, defaults, and rules between settings.

Imports no torch, Ray, vLLM or transformers, so that the launcher reports a wrong setting at once.

Read first: `app.settings.config`.
"""
