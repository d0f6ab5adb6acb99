"""Tests of vescale.fsdp."""
