"""Every parser of files that others wrote, given bytes that nobody meant.

`python -m tests.fuzz TARGET --seconds N` searches with atheris, guided by the coverage of the
package's code; `test_fuzz.py` replays what was found, and mutates the seeds a little every time.
"""
