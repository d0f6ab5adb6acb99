"""Tests of vescale.checkpoint."""
