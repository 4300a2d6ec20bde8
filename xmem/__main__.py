"""`python -m xmem`: the command line."""

from xmem.cli import main

main(prog_name="xmem")
