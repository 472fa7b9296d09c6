"""Programs that measure and write results: none of them draws."""
