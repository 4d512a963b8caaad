
from dataclasses import replace as rp
base=shape_for(132,R,all_sms=True)
def dv(cut,w): return (rp(base,direct=cut,writers=w),'v')
L=[(base,'dfc8mvpHe')]
L+=[(rp(base,dispatch=Cut(1,4096,16,8,64)),'d8f'),(rp(base,dispatch=Cut(1,4096,4,8,64)),'d8f'),(rp(base,dispatch=Cut(1,4096,12,8,64)),'d8f'),(rp(base,channels=52,dispatch=Cut(2,4096,8,8,80)),'d8f'),(rp(base,channels=37,dispatch=Cut(2,4096,8,8,128)),'d8f')]
L+=[(rp(base,send=Cut(2,4096,4,8)),'c'),(rp(base,send=Cut(1,8192,4,8),reduce=Cut(4,1024,4,8,120)),'c'),(rp(base,channels=65),'c'),(rp(base,channels=60),'c')]
L+=[dv(Cut(2,4096,8,16),24),dv(Cut(4,4096,8,32),8),dv(Cut(2,4096,8,32),8),dv(Cut(2,4096,8,8),132),dv(Cut(1,4096,8,4),264)]
L+=[(base,'dfc8mvpHe')]
shapes=L
