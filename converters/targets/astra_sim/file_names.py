"""Names of the files of a workload besides its traces: `export` writes, `check` reads them."""

from onerank.ir.chakra.third_party_traces import GROUP_FILES

GROUPS_FILE = GROUP_FILES[0]

SYSTEM_FILE = "system.json"

ROOFLINE_SYSTEM_FILE = "system_roofline.json"

NETWORK_FILE = "network.yml"

MEMORY_FILE = "memory.json"

LOGGING_FILE = "logging.toml"

SCRIPT_FILE = "run.sh"
