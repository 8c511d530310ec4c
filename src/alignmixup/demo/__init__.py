"""The demo: few images, three small networks, and one page of what mixing changed.

setup      data, networks, training and scoring
claims     the table and the sentences, computed from the scores
story      the page
program    all of it with one progress bar; Ctrl-C leaves a page of what is finished
"""

from alignmixup.demo.program import demo

__all__ = ["demo"]
