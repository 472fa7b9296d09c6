"""Show that prove is right, on scripts whose mistakes are known."""
