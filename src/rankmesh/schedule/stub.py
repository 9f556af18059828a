from rankmesh.schedule.actions import Action, Kind
from rankmesh.schedule.one_f_one_b import one_f_one_b
def stage_ranks(name, ranks, chunks):
    return tuple(s % ranks for s in range(ranks*chunks))
def build_schedule(name, ranks, chunks, microbatches):
    if chunks == 1 and name in ("1f1b","gpipe"):
        return one_f_one_b(ranks, microbatches)
    if chunks == 1:
        out=[]
        for rank in one_f_one_b(ranks, microbatches):
            acts=[]
            for a in rank:
                if a.kind is Kind.B:
                    acts += [Action(Kind.I,a.stage,a.microbatch)]
                else: acts.append(a)
            ws=[Action(Kind.W,a.stage,a.microbatch) for a in acts if a.kind is Kind.I]
            out.append(tuple(acts+ws))
        return tuple(out)
    S=ranks*chunks
    return tuple(tuple([Action(Kind.F,s,m) for s in range(r,S,ranks) for m in range(microbatches)]+[Action(Kind.B,s,m) for s in reversed(range(r,S,ranks)) for m in range(microbatches)]) for r in range(ranks))
def with_communication(schedule):
    home={a.stage:r for r,acts in enumerate(schedule) for a in acts}; last=max(home)
    out=[]
    for r,acts in enumerate(schedule):
        o=[]
        for a in acts:
            s,m=a.stage,a.microbatch
            if a.kind is Kind.F and s>0 and home[s-1]!=r: o.append(Action(Kind.RECV_F,s,m))
            if a.kind in (Kind.B,Kind.I) and s<last and home[s+1]!=r: o.append(Action(Kind.RECV_B,s,m))
            o.append(a)
            if a.kind is Kind.F and s<last and home[s+1]!=r: o.append(Action(Kind.SEND_F,s,m))
            if a.kind in (Kind.B,Kind.I) and s>0 and home[s-1]!=r: o.append(Action(Kind.SEND_B,s,m))
        out.append(tuple(o))
    return tuple(out)
