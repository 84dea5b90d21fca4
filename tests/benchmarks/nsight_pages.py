"""Pieces of what Nsight Compute exported on an H200 for two forward kernels: columns and lines are left out."""

WIDE = """\
"Kernel Name","kernel_cutlass_kernel_dense_mlaforward_sm90_wideForwardSm90W",
"Address","Source","# Samples","Instructions Executed","stall_barrier","stall_long_sb","stall_selected","stall_wait","stall_barrier (Not Issued)"
"0x7ff24f7ad8b0","@P0   BRA 0x7ff24f7add10","0","1584","0","0","0","0","0"
"0x7ff24f7addc0","      UCGABAR_WAIT","17","1584","17","0","0","0","17"
"0x7ff24f7adec0","@P1   BRA 0x7ff24f7af190","1","1584","0","0","0","1","0"
"0x7ff24f7adee0","      USETMAXREG.DEALLOC.CTAPOOL 0x28","62","528","0","59","0","3","0"
"0x7ff24f7ae2c0","      SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR9+0x90], R9","62","147456","0","0","6","42","0"
"0x7ff24f7ae2d0","@!P0  BRA 0x7ff24f7b9730","475","147456","0","448","5","5","0"
"0x7ff24f7ae5b0","@P0   BRA 0x7ff24f7b9630","0","528","0","0","0","0","0"
"0x7ff24f7af180","      BRA 0x7ff24f7ae670","0","124","0","0","0","0","0"
"0x7ff24f7af1a0","      USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xe8","0","1900","0","0","0","0","0"
"0x7ff24f7af1c0","@!P0  BRA 0x7ff24f7af190","0","1900","0","0","0","0","0"
"0x7ff24f7af5e0","      SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR13+0x120], R0","0","2048","0","0","0","0","0"
"0x7ff24f7af5f0","@!P0  BRA 0x7ff24f7b97f0","48","2048","0","48","0","0","0"
"0x7ff24f7b0060","      SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R189+URZ+-0x8], R190","7","65536","0","0","3","4","0"
"0x7ff24f7b0100","@!P0  BRA 0x7ff24f7b9840","2825","65536","0","2820","1","0","0"
"0x7ff24f7b0aa0","      HGMMA.64x64x16.F32.BF16 R152, gdesc[UR8], R152, gsb0","61","65536","0","0","2","49","0"
"0x7ff24f7b0dd0","      BAR.SYNC.DEFER_BLOCKING R192, 0x100","13","64512","0","0","1","8","0"
"0x7ff24f7b0de0","      LDS R195, [R193+0x150]","318","64512","296","0","3","10","242"
"0x7ff24f7b1900","      HGMMA.64x256x16.F32.BF16 R24, gdesc[UR8].tnspB, R24","271","64512","0","0","3","5","0"
"0x7ff24f7b1a70","      HGMMA.64x256x16.F32.BF16 R24, gdesc[UR8].tnspB, R24, gsb0","36","64512","0","0","1","35","0"
"0x7ff24f7b1b10","@!P0  BRA 0x7ff24f7b9b10","143","65536","0","139","4","0","0"
"0x7ff24f7b1d50","      HGMMA.64x64x16.F32.BF16 R152, gdesc[UR8], R152, gsb0","34","65536","0","0","3","26","0"
"0x7ff24f7b1d80","      WARPGROUP.DEPBAR.LE gsb0, 0x1","861","64512","857","0","3","0","805"
"0x7ff24f7b26e0","      HGMMA.64x64x16.F32.BF16 R152, gdesc[UR8], R152, gsb0","46","65536","0","0","5","40","0"
"0x7ff24f7b26f0","      WARPGROUP.DEPBAR.LE gsb0, 0x0","418","65536","410","0","5","2","359"
"0x7ff24f7b3980","      BAR.ARV R2, 0x100","182","65536","0","161","1","20","0"
"0x7ff24f7b43d0","      HGMMA.64x256x16.F32.BF16 R24, R164, gdesc[UR4].tnspB, R24, gsb0","82","65536","0","0","1","51","0"
"0x7ff24f7b43e0","      WARPGROUP.DEPBAR.LE gsb0, 0x0","1496","65536","1455","0","2","2","1003"
"0x7ff24f7b43f0","@P0   SYNCS.ARRIVE.TRANS64.A1T0 RZ, [R0+URZ+0x90], RZ","8","65536","0","0","4","3","0"
"0x7ff24f7b44b0","@!P0  BRA 0x7ff24f7aff50","8","65536","0","0","2","5","0"
"0x7ff24f7b9620","@P1   BRA 0x7ff24f7af400","0","2048","0","0","0","0","0"
"0x7ff24f7b9630","      LDC R0, c[0x0][0x140]","2","1584","0","0","0","0","0"
"0x7ff24f7b96e0","      UCGABAR_WAIT","5630","1584","5630","0","0","0","3763"
"0x7ff24f7b9700","      EXIT","0","1584","0","0","0","0","0"
"0x7ff24f7b9730","      IMAD.U32 R2, RZ, RZ, UR9","0","10773","0","0","0","0","0"
"0x7ff24f7b9740","      SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R2+URZ+0x90], R9","0","10773","0","0","0","0","0"
"0x7ff24f7b9750","@!P0  NANOSLEEP.SYNCS 0x989680","1","10773","0","1","0","0","0"
"0x7ff24f7b9770","@!P0  BRA 0x7ff24f7b9730","0","10773","0","0","0","0","0"
"0x7ff24f7b9780","      BRA 0x7ff24f7ae2e0","0","7238","0","0","0","0","0"
"0x7ff24f7b9840","      SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R189+URZ+-0x8], R190","0","50816","0","0","0","0","0"
"0x7ff24f7b9850","@!P0  NANOSLEEP.SYNCS 0x989680","0","50816","0","0","0","0","0"
"0x7ff24f7b9860","@!P0  SYNCS.PHASECHK.TRANS64 P0, [R189+URZ+-0x8], R190","0","50816","0","0","0","0","0"
"0x7ff24f7b9870","@!P0  BRA 0x7ff24f7b9840","0","50816","0","0","0","0","0"
"0x7ff24f7b9880","      BRA 0x7ff24f7b0110","0","18577","0","0","0","0","0"
"""
FP8 = """\
"Kernel Name","kernel_cutlass_kernel_dense_mlaforward_sm90_fp8ForwardSm90Fp",
"Address","Source","# Samples","Instructions Executed","stall_barrier","stall_long_sb","stall_selected","stall_wait","stall_barrier (Not Issued)"
"0x7f2b2b7b5c40","      BAR.SYNC.DEFER_BLOCKING 0x0","0","1584","0","0","0","0","0"
"0x7f2b2b7b5cd0","@P0   BRA 0x7f2b2b7b6d10","3","1584","0","3","0","0","0"
"0x7f2b2b7b5cf0","      USETMAXREG.DEALLOC.CTAPOOL 0x28","93","528","0","87","0","5","0"
"0x7f2b2b7b5d00","@P1   EXIT","3","528","0","0","0","3","0"
"0x7f2b2b7b6430","      SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R13+URZ+0xc8], R12","5","85205","0","0","0","4","0"
"0x7f2b2b7b6440","@!P0  NANOSLEEP.SYNCS 0x989680","385","85205","0","384","0","1","0"
"0x7f2b2b7b6460","@!P0  BRA 0x7f2b2b7b6420","10","85205","0","10","0","0","0"
"0x7f2b2b7b6cf0","@!P0  EXIT","0","161","0","0","0","0","0"
"0x7f2b2b7b6d00","      BRA 0x7f2b2b7b5d80","8","30","0","0","0","0","0"
"0x7f2b2b7b6d20","      USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xe8","0","1835","0","0","0","0","0"
"0x7f2b2b7b6d40","@!P0  BRA 0x7f2b2b7b6d10","0","1835","0","0","0","0","0"
"0x7f2b2b7b7850","      SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R15+URZ], R14","0","1288","0","0","0","0","0"
"0x7f2b2b7b7860","@!P0  NANOSLEEP.SYNCS 0x989680","22","1288","0","22","0","0","0"
"0x7f2b2b7b90d0","      SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R0+URZ+0xc8], R21","19","32818","0","0","1","15","0"
"0x7f2b2b7b90e0","@!P0  NANOSLEEP.SYNCS 0x989680","81","32818","0","76","2","0","0"
"0x7f2b2b7b90f0","@!P0  SYNCS.PHASECHK.TRANS64 P0, [R0+URZ+0xc8], R21","14","32818","0","0","1","10","0"
"0x7f2b2b7b9100","@!P0  BRA 0x7f2b2b7b90d0","60","32818","0","52","3","2","0"
"0x7f2b2b7b9140","      SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R168+URZ], R21","15","32782","0","0","1","10","0"
"0x7f2b2b7b9150","@!P0  NANOSLEEP.SYNCS 0x989680","394","32782","0","386","1","2","0"
"0x7f2b2b7b9160","@!P0  SYNCS.PHASECHK.TRANS64 P0, [R168+URZ], R21","15","32782","0","0","3","8","0"
"0x7f2b2b7b9170","@!P0  BRA 0x7f2b2b7b9140","66","32782","0","58","4","2","0"
"0x7f2b2b7b9310","      F2FP.F16.E4M3.UNPACK_B R106, R21.H1","1","32768","0","0","1","0","0"
"0x7f2b2b7b93a0","      HGMMA.64x16x16.F32 R24, R108, gdesc[UR48], RZ, !UPT","140","32768","0","0","0","17","0"
"0x7f2b2b7b9450","      HGMMA.64x16x16.F32 R24, R96, gdesc[UR48], R24, gsb0","10","32768","0","0","1","7","0"
"0x7f2b2b7ba050","      F2FP.F16.E4M3.UNPACK_B R108, R100","57","32768","0","0","5","3","0"
"0x7f2b2b7ba2c0","      HGMMA.64x16x16.F32 R24, R96, gdesc[UR40], R24, gsb0","4","32768","0","0","0","4","0"
"0x7f2b2b7ba2d0","      WARPGROUP.DEPBAR.LE gsb0, 0x0","164","32768","164","0","0","0","115"
"0x7f2b2b7ba870","      BAR.SYNC.DEFER_BLOCKING R200, 0x80","4","32768","0","0","4","0","0"
"0x7f2b2b7ba880","      PRMT R151, R23, 0x3120, R23","60","32768","0","0","1","0","0"
"0x7f2b2b7ba8b0","      LDS.64 R136, [R146+-0x10]","45","32768","43","0","2","0","35"
"0x7f2b2b7bafb0","      FENCE.VIEW.ASYNC.S","51","32768","0","33","3","12","0"
"0x7f2b2b7bc0b0","      HGMMA.64x16x16.F32 R40, R172, gdesc[UR52].tnspB, R40, gsb0","11","32768","0","0","0","9","0"
"0x7f2b2b7bc0c0","      WARPGROUP.DEPBAR.LE gsb0, 0x2","11","32768","0","0","0","7","0"
"0x7f2b2b7bc110","      HGMMA.64x16x16.F32 R32, R96, gdesc[UR52].tnspB, R32, gsb0","18","32768","0","0","1","13","0"
"0x7f2b2b7bc120","      WARPGROUP.DEPBAR.LE gsb0, 0x0","165","32768","163","0","2","0","120"
"0x7f2b2b7bc160","@P0   SYNCS.ARRIVE.TRANS64.ART0 RZ, [R0+URZ+0xc8], R21","5","32124","0","0","0","5","0"
"0x7f2b2b7bc190","@!P0  BRA 0x7f2b2b7b8fd0","24","32768","0","0","1","23","0"
"0x7f2b2b7c0830","      EXIT","0","1048","0","0","0","0","0"
"""
DETAILS = """\
    Section: GPU Speed Of Light Throughput
    ----------------------- ----------- ------------
    Metric Name             Metric Unit Metric Value
    ----------------------- ----------- ------------
    DRAM Frequency                  Ghz         3.20
    SM Frequency                    Ghz         1.70
    Elapsed Cycles                cycle      449,138
    Memory Throughput                 %        52.64
    DRAM Throughput                   %        50.06
    Duration                         us       263.23
    L1/TEX Cache Throughput           %        55.24
    L2 Cache Throughput               %        62.89
    SM Active Cycles              cycle   425,311.88
    Compute (SM) Throughput           %        60.51
    ----------------------- ----------- ------------
    Section: Memory Workload Analysis
    -------------------------------------- ----------- ------------
    Metric Name                            Metric Unit Metric Value
    -------------------------------------- ----------- ------------
    Memory Throughput                          Tbyte/s         2.41
    Mem Busy                                         %        52.64
    Max Bandwidth                                    %        50.06
    -------------------------------------- ----------- ------------
    Section: Warp State Statistics
    ---------------------------------------- ----------- ------------
    Metric Name                              Metric Unit Metric Value
    ---------------------------------------- ----------- ------------
    Warp Cycles Per Issued Instruction             cycle        10.29
    Warp Cycles Per Executed Instruction           cycle        10.29
    ---------------------------------------- ----------- ------------
"""
