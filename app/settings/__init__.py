"""Every setting, its default, and the rules between settings.

Runs wherever a configuration is read: in the launcher before Ray starts, and in the process in which Serve
builds the application. The models and rules import nothing heavy (no torch, Ray, vLLM or transformers), so a
wrong setting is reported in milliseconds.

Not here: reading files and command lines (`app.command`), and what a setting does.

Read first: `app.settings.config`.
"""
