"""Optional C++ helpers. Every caller has a Python fallback that gives the same answer."""

from vescale.csrc._loader import load, load_module, step_marks

__all__ = ["load", "load_module", "step_marks"]
