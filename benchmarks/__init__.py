"""What is measured, and what is drawn of it. README.md says where to begin."""
