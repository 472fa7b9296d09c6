"""What shows that prove is right: scripts whose mistakes we know, and what prove says of them."""
