"""Passes before and after layers on one input became one product and packed weights lay wholly in huge pages, in turns.

    python passes_in_turns.py tinyllama-1.1b bfloat16 3          # shape, dtype, turns
"""
import sys, time, ctypes, torch, weakref
from outrider.targets import Target, packed_weights as pw
from outrider.costs.round_timing import verify_times
from outrider.costs.counting import pass_bytes
torch.set_num_threads(1)
shape, dt, turns = sys.argv[1], sys.argv[2], int(sys.argv[3])
def stream(x=torch.rand(2**27)):
    x.sum(); best=0
    for _ in range(5):
        t=time.perf_counter(); x.sum(); best=max(best,x.nbytes/(time.perf_counter()-t)/1e9)
    return best
new_h, new_m = pw._use_huge_pages, pw._multiply_together
def old_h(address, n):
    H=pw._HUGE; b,e=-(-address//H)*H,(address+n)//H*H
    if b<e: ctypes.CDLL(None).madvise(ctypes.c_void_p(b), ctypes.c_size_t(e-b), 25)
t=Target.load(f"embedded@{shape}", dtype=dt)
kinds={}
for name,(h,m) in {"before":(old_h,lambda p:None),"pages":(new_h,lambda p:None),"pages+together":(new_h,new_m)}.items():
    if shape!="0.4b" and name=="pages": continue
    pw._use_huge_pages, pw._multiply_together = h, m
    pw._COPIES=weakref.WeakKeyDictionary(); t.pack(); kinds[name]=t.packed
    verify_times(t,[0,4],context=256,repeats=1)
nb=pass_bytes(t); least={k:{} for k in kinds}; ss=[]
for _ in range(turns):
    ss.append(stream())
    for k,p in kinds.items():
        t.packed=p
        for n,s in verify_times(t,[0,1,2,4,7],context=256,repeats=5).items():
            least[k][n+1]=min(s,least[k].get(n+1,9))
s=max(ss); print(shape,dt,"stream",[f"{x:.1f}" for x in ss],f"floor {nb/s/1e6:.1f} ms")
for k,v in least.items(): print(f"  {k:16s}", "  ".join(f"T({n})={1e3*x:.1f} ms {nb/s/1e9/x:.0%}" for n,x in v.items()), flush=True)
