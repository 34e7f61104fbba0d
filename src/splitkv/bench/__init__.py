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
app.py       the sub-commands of `splitkv bench`

attention.py `splitkv bench attention`: parity, then time, of ours beside other libraries; attention_command.py its
             command line, attention_cases.py its cases, attention_data.py the memory they share
ranks.py     `splitkv bench ranks`: one row on one device and over several; ranks_command.py its command line
contender.py what takes part; peers.py all of them, peers_torch.py, peers_flashinfer.py and peers_fa3.py how
summary.py   best peers, goals met and straight lines, out of the rows of a result file
report.py    `splitkv report`: one page of HTML; report_command.py its command line, plots.py its figures
"""
