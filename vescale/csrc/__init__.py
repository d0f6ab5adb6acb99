"""Optional C++ helpers. Every caller has a Python fallback that gives the same answer."""

from vescale.csrc._loader import dispatcher, load, load_module, step_marks

__all__ = ["dispatcher", "load", "load_module", "step_marks"]
