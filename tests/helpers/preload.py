"""What the fork server imports of the helpers, so that no rank needs to.

It begins in the root of the repository, and does not know where the helpers are.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import helpers.refusals
import helpers.replayed_runs  # noqa: F401
from local_ranks.machine import scratch_folder

scratch_folder()  # so the ranks' folders lie in one that ends with this server: a rank removes none
