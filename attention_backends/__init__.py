"""Attention over a ragged mixed batch of drafting, verifying and prefilling rows.

``layout``           which rows a step holds, over which positions
``base``             the plan/run contract, the selected page sets and what selects them
``torch_reference``  the plain PyTorch backend: CPU, and the oracle of every other backend
``selection``        from page scores to page sets
"""
