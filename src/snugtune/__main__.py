"""`python -m snugtune`, which is also what torchrun starts."""

from snugtune.cli import main

main()
