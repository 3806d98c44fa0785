"""Measuring the devices at hand: what `autoplan profile` runs, and where its results are kept and found."""

from .store import find_profile, profile_path

__all__ = ["find_profile", "profile_path"]
