"""The certificate of a run: its measured gradients compared with the convergence theorems.

`certify` in `assemble` is the entry. It replays the kept rounds of a run (`replay`), follows each
client through its local steps (`trajectories`), and evaluates the loss that all clients minimise
together (`global_loss`). From that, `measure` computes the theorems' constants (`constants`), which
for softmax regression are proved (`softmax_case`), and lists violated assumptions (`assumptions`).
"""

from fedcover.theory.certificate.assemble import certify as certify
