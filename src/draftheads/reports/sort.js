// Buttons in the headings of tables sort the rows: numbers from the largest, words from A. A second click turns the order.
for (const table of document.querySelectorAll('.wide table')) {
  const body = table.tBodies[0];
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    if (body.rows.length < 2 || !head.textContent) return;
    const button = document.createElement('button');
    button.type = 'button';
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener('click', () => {
      const words = (row) => row.cells[column].textContent.trim();
      const number = (row) => {
        const found = words(row).match(/^-?\d[\d,]*\.?\d*(\s[kMB]$)?/);
        if (!found) return NaN;
        return parseFloat(found[0].replaceAll(',', '')) * ({ k: 1e3, M: 1e6, B: 1e9 }[found[0].at(-1)] ?? 1);
      };
      const filled = [...body.rows].filter(words);
      const empty = [...body.rows].filter((row) => !words(row)); // stay at the end
      const areNumbers = filled.every((row) => !isNaN(number(row)));
      const before = head.getAttribute('aria-sort');
      const order = before ? (before === 'ascending' ? 'descending' : 'ascending') : areNumbers ? 'descending' : 'ascending';
      const compare = areNumbers ? (a, b) => number(a) - number(b) : (a, b) => words(a).localeCompare(words(b));
      filled.sort((a, b) => (order === 'ascending' ? compare(a, b) : compare(b, a)));
      body.append(...filled, ...empty);
      heads.forEach((other) => other.removeAttribute('aria-sort'));
      head.setAttribute('aria-sort', order);
    });
  });
}
