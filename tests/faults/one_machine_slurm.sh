#!/usr/bin/env bash
# A Slurm cluster of two nodes on this machine, with accounting and a preemptible partition, for
# test_faults_slurm.py. As root on Debian, in a container that is thrown away: it overwrites the
# configuration of Slurm.
set -euo pipefail

apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
  slurmctld slurmd slurmdbd slurm-client munge mariadb-server

root=$(mktemp -d)
mkdir -p "$root"/{state,node1,node2} /run/munge
chown munge:munge /run/munge
service mariadb start
mysql -e "create database if not exists slurm_acct_db;
          create user if not exists slurm@localhost identified by 'slurm';
          grant all on slurm_acct_db.* to slurm@localhost;"
runuser -u munge -- munged --force

cat > /etc/slurm/slurmdbd.conf <<END
AuthType=auth/munge
DbdHost=localhost
SlurmUser=root
StorageType=accounting_storage/mysql
StorageUser=slurm
StoragePass=slurm
LogFile=$root/slurmdbd.log
PidFile=$root/slurmdbd.pid
END
chmod 600 /etc/slurm/slurmdbd.conf

cat > /etc/slurm/slurm.conf <<END
ClusterName=test
SlurmctldHost=$(hostname)(127.0.0.1)
SlurmUser=root
SlurmdUser=root
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=2
StateSaveLocation=$root/state
SlurmdSpoolDir=$root/%n
SlurmctldPidFile=$root/slurmctld.pid
SlurmdPidFile=$root/%n.pid
SlurmctldLogFile=$root/slurmctld.log
SlurmdLogFile=$root/%n.log
SchedulerParameters=sched_interval=2,bf_interval=2,preempt_send_user_signal
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=10
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=localhost
NodeName=node1 NodeHostname=$(hostname) NodeAddr=127.0.0.1 Port=17001 CPUs=2 State=UNKNOWN
NodeName=node2 NodeHostname=$(hostname) NodeAddr=127.0.0.1 Port=17002 CPUs=2 State=UNKNOWN
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF
END

wait_for() { for _ in {1..60}; do if "$@" &> /dev/null; then return; fi; sleep 1; done; "$@"; }
slurmdbd
wait_for sacctmgr -n list cluster
sacctmgr -i add cluster test > /dev/null || true  # it may be there
slurmctld
slurmd -N node1
slurmd -N node2
wait_for sinfo
sinfo
