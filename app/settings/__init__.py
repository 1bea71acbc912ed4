"""Every setting, its default, and the rules between settings.

Imports nothing heavy (no torch, Ray, vLLM or transformers), so the launcher reports a wrong setting before
Ray starts. Files and command lines are read in `app.command`.

Read first: `app.settings.config`.
"""
