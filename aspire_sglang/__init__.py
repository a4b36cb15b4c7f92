"""ASPIRE self-speculative decoding as a plugin for SGLang: sparse drafts, exact verification, one mixed batch."""

__version__ = "0.1.0"
