#!/bin/bash
set -eu
cd /workspace
sed -i s/king/cow/ milk.log
