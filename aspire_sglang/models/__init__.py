"""The embedded default model: where it comes from, how it is converted, where it is kept."""
