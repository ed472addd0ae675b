import sys, time
sys.path.insert(0, "src")
import torch
from torch.nn.functional import cross_entropy
from fedcover.models import wide_resnet
from fedcover.policies.planned import planned
from fedcover.policies.magnitude import magnitude
from fedcover.submodel import submodel
from fedcover.types import Client, Coverage, View
print(torch.__version__, torch.cuda.get_device_name())
torch.manual_seed(0)
m = wide_resnet((3, 32, 32), 10, "batch", widen=8)
m.module.cuda()
params = {n: p.detach() for n, p in m.module.named_parameters()}
print(sum(p.numel() for p in params.values()), "parameters", len(m.groups), "groups")
cohort = tuple(Client(i, 0.5 if i < 4 else 0.25, i, 1, ()) for i in range(10))
view = View(0, params, m.groups, m.prunable, cohort, (0.5, 0.25), "width", Coverage((), {}), 0)
def timed(f, n=5):
    out = []
    for _ in range(n):
        torch.cuda.synchronize(); t = time.perf_counter(); r = f(); torch.cuda.synchronize(); out.append(time.perf_counter() - t)
    return r, [round(x, 4) for x in out]
for kind in ("subnet", "pruning"):
    parts, s = timed(lambda: planned(view, kind=kind)); print("planned", kind, s)
    if kind == "subnet": slices = parts
_, s = timed(lambda: magnitude(view)); print("magnitude", s)
x, y = torch.randn(10, 3, 32, 32, device="cuda"), torch.randint(10, (10,), device="cuda")
total = 0.0
for n in (0, 9):
    net = submodel(m.module, slices[n], params).train()
    opt = torch.optim.SGD(net.parameters(), 0.01, momentum=0.5)
    def step():
        opt.zero_grad(); cross_entropy(net(x), y).backward(); opt.step()
    for _ in range(10): step()
    _, s = timed(lambda: [step() for _ in range(50)], 2)
    print("client", n, "50 eager steps", s); total += min(s) * 5 * (4 if n == 0 else 6)
print("eager round of 10 clients x 250 steps of 10 images (extrapolated from 50 steps each)", round(total, 2), "s")
