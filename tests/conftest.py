"""Hypothesis tries the same examples in every run; `--hypothesis-profile random` tries others."""

from hypothesis import settings

# A deadline would test how busy the machine is.
settings.register_profile(
    "random", settings.get_profile("default"), deadline=None, derandomize=False
)
settings.load_profile("ci")
