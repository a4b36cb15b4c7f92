"""The only package of the project that imports SGLang (pinned: see :mod:`.version`)."""
