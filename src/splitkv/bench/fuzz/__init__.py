"""`splitkv bench fuzz`: random problems over the whole argument space, each held against float64.

cases.py    a case as plain data, and JSON
draw.py     which cases there are: random.Random(f"{seed}/{index}") and nothing else
tensors.py  a case as tensors in one arena of poisoned, guarded bytes
oracle.py   the right answer in float64, vectorised, with the bound that an answer is held to
checks.py   one case: called, compared, and called again in another shape for the same bytes
shrink.py   the smallest case that still fails
run.py      many cases in many processes, and the result file
"""
