"""Finds out what is wrong with a machine. All facts are read in one place, so they can be recorded and replayed.

`machine.py` asks the questions, the functions in `checks/` are pure and judge the answers, `diagnosis.py` runs them.
The doctor changes nothing: a finding carries the commands that would fix the problem, and they are never run. This
package imports no torch, because a torch that does not load is a finding.
"""
