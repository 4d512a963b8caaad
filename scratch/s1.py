
D=Cut(1,4096,8,8,64)
base=Shape(64,D,Cut(1,8192,4,8),Cut(4,1024,4,8,128),Cut(2,4096),131)
from dataclasses import replace as rp
def dv(cut,w): return (rp(base,direct=cut,writers=w),'v')
L=[(base,'dfc8mvpe')]
L+=[(rp(base,send=Cut(1,8192,4,8),reduce=Cut(2,4096,4,8,128)),'c'),(rp(base,send=Cut(1,8192,2,8)),'c'),(rp(base,send=Cut(1,8192,8,8)),'c'),(rp(base,channels=52,reduce=Cut(4,1024,4,8,128)),'c'),(rp(base,reduce=Cut(8,512,4,8,128)),'c'),(rp(base,send=Cut(2,4096,4,8)),'c')]
L+=[dv(Cut(1,4096),131),dv(Cut(1,4096),263),dv(Cut(2,2048),263),dv(Cut(4,4096,8,16),131),dv(Cut(4,4096,8,16),23),dv(Cut(2,4096,8,16),23),dv(Cut(4,4096,8,32),7),dv(Cut(8,4096,8,32),7)]
shapes=L
