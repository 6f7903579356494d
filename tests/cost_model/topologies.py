"""What the three tools print for small machines, written out by hand after their documentation."""

from __future__ import annotations

_HEAD = "\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m"

BRIDGED_PAIRS = f"""\
\t{_HEAD}
GPU0\t X \tNV4\tPXB\tSYS\tPIX\tSYS\t0-15,64-79\t0\t\tN/A
GPU1\tNV4\t X \tPXB\tSYS\tPXB\tSYS\t0-15,64-79\t0\t\tN/A
GPU2\tPXB\tPXB\t X \tSYS\tPXB\tSYS\t0-15,64-79\t0-1\t\tN/A
GPU3\tSYS\tSYS\tSYS\t X \tSYS\tNODE\t32-47,96-111\t2\t\tN/A
NIC0\tPIX\tPXB\tPXB\tSYS\t X \tSYS\t\t\t\t
NIC1\tSYS\tSYS\tSYS\tNODE\tSYS\t X \t\t\t\t

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NV#  = Connection traversing a bonded set of # NVLinks

NIC Legend:

  NIC0: mlx5_0
  NIC1: mlx5_1
"""
"""Two cards bridged, a third behind other PCIe switches, a fourth on the second socket."""

SWITCHED_PAIR = """\
        GPU0    GPU1    CPU Affinity    NUMA Affinity   GPU NUMA ID
GPU0     X      NV18    0-47            0               N/A
GPU1    NV18     X      0-47            0               N/A
"""

NCCL_SWITCHED_PAIR = """\
<system version="1">
  <cpu host_hash="0x5f3a" numaid="0" affinity="0000ffff" arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="143">
    <pci busid="0000:15:00.0" class="0x060400" vendor="0x1000" device="0xc030" link_width="16">
      <pci busid="0000:18:00.0" class="0x030200" vendor="0x10de" device="0x2335" link_width="16">
        <gpu dev="0" sm="90" rank="0" gdr="1">
          <nvlink target="fffffff:ffff:ff" count="18" tclass="0x068000"/>
        </gpu>
      </pci>
      <pci busid="0000:19:00.0" class="0x020700" vendor="0x15b3" device="0x1021" link_width="16">
        <nic>
          <net name="mlx5_0" dev="0" latency="0.000000" speed="400000" port="1" guid="0x1" maxconn="131072" gdr="1"/>
        </nic>
      </pci>
    </pci>
    <pci busid="0000:29:00.0" class="0x030200" vendor="0x10de" device="0x2335" link_width="16">
      <gpu dev="1" sm="90" rank="1" gdr="1">
        <nvlink target="fffffff:ffff:ff" count="18" tclass="0x068000"/>
      </gpu>
    </pci>
    <nic>
      <net name="eth0" dev="1" speed="10000" port="0" guid="0x0" maxconn="65536" gdr="0"/>
    </nic>
  </cpu>
</system>
"""

NCCL_BRIDGED = """\
<system version="1">
  <cpu numaid="0" arch="x86_64">
    <pci busid="0000:01:00.0" class="0x060400">
      <pci busid="0000:02:00.0" class="0x030200">
        <gpu dev="0" sm="80">
          <nvlink target="0000:03:00.0" count="4" tclass="0x030200"/>
        </gpu>
      </pci>
      <pci busid="0000:03:00.0" class="0x030200">
        <gpu dev="1" sm="80">
          <nvlink target="0000:02:00.0" count="4" tclass="0x030200"/>
        </gpu>
      </pci>
      <pci busid="0000:04:00.0" class="0x060400">
        <pci busid="0000:05:00.0" class="0x030200">
          <gpu dev="2" sm="80"/>
        </pci>
      </pci>
    </pci>
  </cpu>
  <cpu numaid="1" arch="x86_64">
    <pci busid="0000:81:00.0" class="0x030200">
      <gpu dev="3" sm="80"/>
    </pci>
  </cpu>
</system>
"""

SLURM_TREE = """\
# two racks of leaves below one pair of spines
SwitchName=leaf0 Nodes=gpu[001-004]   LinkSpeed=400
switchname=leaf1 nodes=gpu[005-008] # the older rack
SwitchName=leaf2 \\
    Nodes=gpu[009-010],big1
SwitchName=spine0 Switches=leaf[0-1]
SwitchName=spine1 Switches=leaf2
SwitchName=core Switches=spine[0-1]
"""

SLURM_BLOCKS = """\
BlockName=rack1 Nodes=n[01-18]
BlockName=rack2 Nodes=n[19-36]
BlockName=rack3 Nodes=n[37-54]
BlockSizes=16,32
"""
