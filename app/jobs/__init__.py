"""Ray jobs that run against a fleet over HTTP."""
