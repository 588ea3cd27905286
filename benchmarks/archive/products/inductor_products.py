"""Gigabytes per second that Inductor's frozen and tuned products of few rows read.

    python inductor_products.py bfloat16
"""
import ctypes, sys, time, torch, torch.nn as nn
import torch._inductor.config as ic
libc = ctypes.CDLL(None, use_errno=True)
H = 2**21
def huge(addr, n, adv=25):
    b, e = -(-addr//H)*H, (addr+n)//H*H
    return libc.madvise(ctypes.c_void_p(b), ctypes.c_size_t(e-b), adv) if b<e else None
def best(f, n=7):
    f(); ts=[]
    for _ in range(n):
        t=time.perf_counter(); f(); ts.append(time.perf_counter()-t)
    ts.sort(); return ts[0], ts[len(ts)//2]
def rep(name, M, nbytes, f):
    a,b = best(f); print(f"  {name:34s} M={M:2d}  best {nbytes/a/1e9:5.1f}  median {nbytes/b/1e9:5.1f} GB/s", flush=True)
def stream():
    x=torch.rand(2**27); a,_=best(x.sum); print(f"stream sum fp32: {x.nbytes/a/1e9:.1f} GB/s", end=" ")
    print("collapse", huge(x.data_ptr(), x.nbytes)); a,_=best(x.sum); print(f"   with huge pages: {x.nbytes/a/1e9:.1f} GB/s", flush=True)
torch.set_num_threads(1); torch.set_grad_enabled(False)
ic.freezing=True; ic.max_autotune=True
if len(sys.argv)>2: ic.max_autotune_gemm_backends=sys.argv[2]
dt=getattr(torch,sys.argv[1])
for N,K in [(2048,2048),(2048,5632)]:
    c=max(1,int(3e8/(N*K*dt.itemsize)))
    c=min(c,6) if N<4000 else c
    class L(nn.Module):
        def __init__(s):
            super().__init__(); s.l=nn.ModuleList(nn.Linear(K,N,bias=False) for _ in range(c))
        def forward(s,x): return [l(x) for l in s.l]
    m=L().to(dt).eval(); nb=sum(p.nbytes for p in m.parameters())
    for M in (1,5,8):
        stream() if M==1 else None; torch._dynamo.reset(); x=torch.randn(M,K).to(dt); t=time.time()
        f=torch.compile(m,dynamic=False); f(x); t=time.time()-t
        rep(f"inductor {N}x{K} c={c} {t:.0f}s",M,nb,lambda:f(x))
