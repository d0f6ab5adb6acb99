"""Plans that ship with the library: ``plan_zoo.load("llama", mesh)``."""

from vescale.plan_zoo._loader import About, about, load, names, path_of

__all__ = ["About", "about", "load", "names", "path_of"]
