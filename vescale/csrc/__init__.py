"""Optional C++ helpers. Callers have Python fallbacks that give the same answer; only static mode needs the helpers."""

from vescale.csrc._loader import dispatcher, helper_states, load, load_module, missing_helpers, step_marks, tape
from vescale.csrc._rebuild import rebuild_command
