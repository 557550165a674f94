"""What is wrong with a machine: checks over answers that are read in one place, so that they can be recorded and
replayed.

`machine.py` asks, `checks/` judge and are pure, `diagnosis.py` runs them. Nothing here changes anything: a finding
carries the commands that would, and nobody runs them. Imports no torch: a torch that does not load is a finding.
"""
