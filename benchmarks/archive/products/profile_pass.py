"""A pass over packed weights by operation, after 256 tokens.

    python profile_pass.py 0.4b 1,5          # shape, tokens of the passes
"""
import sys, time, torch, collections
from outrider.targets import Target
from outrider.costs.round_timing import committed_cache, random_tokens
from outrider.targets.split_attention import steady_kernels
from torch.profiler import profile, ProfilerActivity
shape, Q = sys.argv[1], [int(x) for x in sys.argv[2].split(",")]
torch.set_num_threads(1)
def stream():
    x=torch.rand(2**27); x.sum(); return max(x.nbytes/(lambda t:(x.sum(),time.perf_counter()-t)[1])(time.perf_counter()) for _ in range(6))/1e9
t=Target.load(f"embedded@{shape}", dtype="bfloat16"); t.pack()
from outrider.costs.counting import pass_bytes
nb=pass_bytes(t)
with torch.inference_mode(), steady_kernels():
    cache=committed_cache(t,1,256,40)
    for q in Q:
        tok=random_tokens(t,1,q)
        f=lambda: t.forward(tok,cache)
        for _ in range(3): f()
        ts=[]
        for _ in range(11):
            b=time.perf_counter(); f(); ts.append(time.perf_counter()-b)
        ts.sort(); s=stream()
        print(f"{shape} Q={q}: least {1e3*ts[0]:.1f} median {1e3*ts[5]:.1f} ms; {nb/1e9:.2f} GB, stream {s:.1f} GB/s, floor {nb/s/1e6:.1f} ms = {nb/s/1e9/ts[5]:.0%}", flush=True)
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as p:
            for _ in range(5): f()
        rows=p.key_averages(group_by_input_shape=True)
        tot=sum(r.self_cpu_time_total for r in rows)
        print("profiled total per pass ms", tot/5e3)
        for r in sorted(p.key_averages(),key=lambda r:-r.self_cpu_time_total)[:22]:
            print(f"   {r.key:45s} {r.self_cpu_time_total/5e3:8.2f} ms  n={r.count/5:.0f} each {r.self_cpu_time_total/r.count:.0f} us")
        for r in sorted(rows,key=lambda r:-r.self_cpu_time_total)[:10]:
            print(f"   {r.key:40s} {r.self_cpu_time_total/5e3:8.2f} ms n={r.count/5:.0f} {r.input_shapes[:3]}")
