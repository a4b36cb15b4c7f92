"""``python -m aspire_sglang.models``: fetch the default model if need be and print its folder."""

import sys

from aspire_sglang.cli import main

sys.exit(main(["model", *sys.argv[1:]]))
