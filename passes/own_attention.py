"""placeholder"""
def recognise_attention(program): pass
