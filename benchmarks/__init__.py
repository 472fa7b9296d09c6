"""What is measured, and what is drawn of it. README.md says where to begin."""

import local_ranks.chapters  # noqa: F401, it lets the modules here import chapters
