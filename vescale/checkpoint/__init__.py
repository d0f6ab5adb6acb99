"""Checkpoints that survive crashes, load on any mesh, and go to and from Hugging Face."""

__all__: list[str] = []
