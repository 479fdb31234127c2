"""How a command becomes processes on machines: `python -m launch NAME`."""
