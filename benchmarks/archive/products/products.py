"""Gigabytes per second that products of few rows read, by the ways that torch has: weights far larger than caches.

    python products.py          # bfloat16; `fp32` for float32
"""
import sys, time, ctypes, torch, torch.nn.functional as F
torch.set_num_threads(1); torch.set_grad_enabled(False)
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
which = sys.argv[1:] 
stream()
shapes=[(2048,2048),(11264,2048),(5632,2048),(2048,5632),(2560,2048),(1024,1024),(32000,2048)]
mk=torch.ops.mkldnn
for dt in (torch.bfloat16,) if 'fp32' not in which else (torch.float32,):
  for N,K in shapes:
    c=max(1,int(3e8/(N*K*dt.itemsize)))
    Ws=[(torch.randn(N,K)*.02).to(dt) for _ in range(c)]
    nb=sum(w.nbytes for w in Ws); print(N,K,dt,c,f"{nb/1e6:.0f} MB")
    xs={M:torch.randn(M,K).to(dt) for M in (1,2,4,5,8,16)}
    for M in (1,4,5): rep("F.linear",M,nb,lambda:[F.linear(xs[M],w) for w in Ws])
    rep("mv",1,nb,lambda:[torch.mv(w,xs[1][0]) for w in Ws])
    for w in Ws: huge(w.data_ptr(), w.nbytes)
    for M in (1,5): rep("F.linear huge",M,nb,lambda:[F.linear(xs[M],w) for w in Ws])
    rep("mv huge",1,nb,lambda:[torch.mv(w,xs[1][0]) for w in Ws])
    for rows in (1,8):
        P=[mk._reorder_linear_weight(w,rows) for w in Ws]
        for hp in (0,1):
            if hp: r=[huge(mk.data_ptr(p), mk._nbytes(p)) for p in P]
            for M in ((1,) if rows==1 else (1,2,4,5,8,16)):
                rep(f"onednn packed rows={rows} huge={hp}",M,nb,lambda:[mk._linear_pointwise(xs[M],p,None,"none",[],"") for p in P])
        del P
    if dt==torch.bfloat16:
        try:
            P=[torch.fbgemm_pack_gemm_matrix_fp16(w.float()) for w in Ws]
            for M in (1,2,4,5,8):
                xf=xs[M].float(); rep("fbgemm fp16",M,nb,lambda:[torch.fbgemm_linear_fp16_weight_fp32_activation(xf,p,None) for p in P])
            del P
        except Exception as e: print("fbgemm", repr(e)[:200])
    else:
        try:
            P=[torch.ops.prepacked.linear_clamp_prepack(w,None,None,None) for w in Ws]
            for M in (1,4,5,8): rep("xnnpack",M,nb,lambda:[torch.ops.prepacked.linear_clamp_run(xs[M],p) for p in P])
            del P
        except Exception as e: print("xnn", repr(e)[:200])
        try:
            P={M:[torch.ops.mkl._mkl_reorder_linear_weight(w.to_mkldnn(),M) for w in Ws] for M in (4,)}
            for M in P: rep("mkl packed",M,nb,lambda:[torch.ops.mkl._mkl_linear(xs[M],p,w,None,M) for p,w in zip(P[M],Ws)])
        except Exception as e: print("mkl", repr(e)[:200])
