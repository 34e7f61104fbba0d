"""Measuring splitkv, through its public API only. Nothing else in the package imports this.

machine.py   what this computer is: processor, caches, memory, GPU, driver, versions
record.py    result files: provenance, the command that re-creates a file, writing it whole or not at all
roofline.py  the machine's own read bandwidth, and read_kernel.py the Triton kernel that reads
timing.py    rotating sets, interleaved contenders, medians, and the rules that reject a timing
parity.py    errors against float64 and the rules that withhold a speed
cases.py     which rungs there are, their options, and the memory they rotate over
rungs.py     `splitkv rungs`
planning.py  `splitkv plan`
doctor.py    `splitkv doctor`
commands.py  the command line of the three, and render.py what they print
"""
